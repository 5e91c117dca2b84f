"""Results of a model with and without this package, which this file does not import."""

import torch


def results_of(head, body, encoder, inputs):
    """Return logits, states, generated ids, loss and gradients of one model in three classes."""
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        results = {
            "logits": head(**inputs).logits,
            "hidden_states": body(**inputs).last_hidden_state,
            "encoder_output": encoder(**source).last_hidden_state,
            "greedy": head.generate(**source, max_new_tokens=5, num_beams=1, do_sample=False),
            "beams": head.generate(**source, max_new_tokens=5, num_beams=2, do_sample=False),
        }
        torch.manual_seed(3)
        # Ends of rows would move the random numbers of the rows that remain.
        sampling = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": True, "top_p": 0.9}
        results["samples"] = head.generate(**source, **sampling, num_return_sequences=3)
    head.train()
    results["loss"] = head(**inputs, labels=inputs["decoder_input_ids"]).loss
    results["loss"].backward()
    results["gradients"] = [parameter.grad for parameter in head.parameters()]
    head.eval()
    return results
