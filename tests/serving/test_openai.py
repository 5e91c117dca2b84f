import numpy as np
import openai
import pytest
import requests


def client_of(url, key="right"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(model_url):
    with client_of(model_url) as client:
        yield client


@pytest.fixture
def complete(client):
    return lambda prompt, **options: client.completions.create(model="en-de", prompt=prompt, **options)


def test_client_completes_prompts(complete, generator):
    completion = complete("the cat")
    [target] = generator.generate(["the cat"])
    [choice] = completion.choices
    assert (choice.text, choice.index, completion.model) == (target, 0, "en-de")
    # The end of sequence is a token, too.
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("the cat") + 1, len(target) + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    prompts = ["the cat", "a dog"]
    choices = complete(prompts, n=2).choices
    rows = generator.generate_n_best(prompts, num_beams=2, num_return_sequences=2)
    assert [choice.text for choice in choices] == [target.text for row in rows for target in row]
    assert [choice.index for choice in choices] == [0, 1, 2, 3]


def test_client_gets_embeddings(client, generator):
    texts = ["the cat", "a dog"]
    expected = generator.embed(texts)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="en-de", input=texts, **options)
        np.testing.assert_allclose([row.embedding for row in answer.data], expected, atol=1e-6)
        assert answer.usage.prompt_tokens == len("the cat") + len("a dog") + 2
    assert client.embeddings.create(model="en-de", input="a dog").data[0].index == 0


def test_tokens_stop_and_temperature_have_their_effect(complete, generator):
    [short], [full] = generator.generate(["the cat"], max_new_tokens=3), generator.generate(["the cat"])
    [choice] = complete("the cat", max_tokens=3).choices
    assert (choice.text, choice.finish_reason) == (short, "length")
    [choice] = complete("the cat", stop=full[2]).choices
    assert (choice.text, choice.finish_reason) == (full[: full.index(full[2])], "stop")
    # Clients send these values by default.
    [choice] = complete("the cat", temperature=0, top_p=1, presence_penalty=0, logit_bias={}).choices
    assert choice.text == generator.generate(["the cat"], num_beams=1)[0]
    sampled = [complete("the cat", temperature=1, seed=seed).choices[0].text for seed in (1, 1, 2, 3)]
    assert sampled[0] == sampled[1] and len(set(sampled)) > 1
    [choice] = complete("the cat", extra_body={"num_beams": 3, "max_new_tokens": 4, "src_lang": "en"}).choices
    assert choice.text == generator.generate(["the cat"], num_beams=3, max_new_tokens=4)[0]


def test_stream_has_the_same_text_and_ends_with_a_mark(complete, generator, model_url):
    [target] = generator.generate(["the cat"])
    chunks = list(complete("the cat", stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(pieces) == target
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(pieces) - 1) + ["length"]
    assert chunks[-1].usage == complete("the cat").usage
    stop = target[3:5]
    pieces = [chunk.choices[0].text for chunk in complete("the cat", stream=True, stop=[stop, "?"])]
    assert "".join(pieces) == target[: target.index(stop)]
    body, headers = {"model": "en-de", "prompt": "the cat", "stream": True}, {"Authorization": "Bearer right"}
    assert requests.post(f"{model_url}/v1/completions", json=body, headers=headers).text.endswith(
        "\n\ndata: [DONE]\n\n"
    )


def test_the_last_user_message_of_a_chat_is_the_source(client, complete, generator):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "ein Hund"},
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]},
    ]
    options = {"model": "en-de", "messages": messages, "max_completion_tokens": 6}
    answer, expected = client.chat.completions.create(**options, n=2), complete("the cat", max_tokens=6, n=2)
    assert answer.object == "chat.completion" and answer.usage == expected.usage
    for choice, completion in zip(answer.choices, expected.choices, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", completion.text)
        assert (choice.index, choice.finish_reason) == (completion.index, completion.finish_reason)
    options["messages"] = [{"role": "user", "content": "the cat. a dog."}]
    [target] = generator.generate(["the cat. a dog."], max_new_tokens=6, split_sentences=True)
    *chunks, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta for chunk in chunks]
    assert [piece.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1) and len(pieces) > 1
    assert "".join(piece.content for piece in pieces) == target and last.usage.total_tokens
    assert last.object == "chat.completion.chunk" and chunks[-1].choices[0].finish_reason == "length"


def test_client_reads_models(client):
    assert [model.id for model in client.models.list()] == ["en-de", "de-en"]
    assert client.models.retrieve("de-en").id == "de-en"
    with pytest.raises(openai.NotFoundError, match="de-en"):
        client.models.retrieve("other/model")


def test_client_raises_its_errors(client, complete, model_url):
    with client_of(model_url, "wrong") as other, pytest.raises(openai.AuthenticationError, match="API key"):
        other.completions.create(model="en-de", prompt="a cat")
    with pytest.raises(openai.NotFoundError, match="en-de, de-en"):
        client.completions.create(model="other", prompt="a cat")
    with pytest.raises(openai.NotFoundError, match="language 'fr'"):
        complete("a cat", extra_body={"tgt_lang": "fr"})
    for message, options in (
        ("'echo'", {"echo": True}),
        ("'best_of'", {"best_of": 3}),
        ("`prompt", {"prompt": [[1, 2]]}),
        ("one text", {"prompt": ["a cat", "a dog"], "stream": True}),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            complete(**{"prompt": "a cat", **options})
    for messages in ([], [{"role": "system", "content": "Be brief."}]):
        with pytest.raises(openai.BadRequestError, match="role user"):
            client.chat.completions.create(model="en-de", messages=messages)
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.moderations.create(input="a cat")
