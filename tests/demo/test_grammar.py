"""The grammar of the demo corpus: English and German examples by hand, and held-out combinations."""

from itertools import product

import pytest
from demo_phrases import (
    ADJECTIVE_OF,
    DETERMINERS,
    NOUN_OF,
    SAY_OF,
    VERB_OF,
    clause,
    phrase,
    prepositional,
    question,
    statement,
    who,
)

from metaphrase.demo import grammar as lexicon
from metaphrase.demo.corpus import combinations, split_of_combination, split_of_sentence
from metaphrase.demo.grammar import ADJECTIVES, NOUNS, VERBS, Case, Gender, NounPhrase, Sentence, Subordinate
from metaphrase.demo.languages import german_nominal, german_present, to_english, to_german

PAST, NOT = {"is_past": True}, {"is_negated": True}
CAN, MUST, SHOULD, WANT = ({"modal": modal} for modal in lexicon.MODALS)
OFTEN, ALWAYS, NEVER, SOMETIMES = ({"frequency": adverb} for adverb in lexicon.FREQUENCIES)

GOLD = {
    # Cases, genders, articles
    "The cat is black. | Die Katze ist schwarz.": statement("the cat", "be", predicate="black"),
    "The dog sees the cat. | Der Hund sieht die Katze.": statement("the dog", "see", "the cat"),
    "The cat sees the dog. | Die Katze sieht den Hund.": statement("the cat", "see", "the dog"),
    "A boy helps the children. | Ein Junge hilft den Kindern.": statement("a boy", "help", "the children"),
    "The girl thanks the boy. | Das Mädchen dankt dem Jungen.": statement("the girl", "thank", "the boy"),
    "Every king loves my book. | Jeder König liebt mein Buch.": statement("every king", "love", "my book"),
    "These ducks sleep. | Diese Enten schlafen.": statement("these ducks", "sleep"),
    # Adjectives
    "The old man buys an ugly umbrella. | Der alte Mann kauft einen hässlichen Regenschirm.": statement(
        "the old man", "buy", "an ugly umbrella"
    ),
    "A small black cat sees the small white mice. | Eine kleine schwarze Katze sieht die kleinen weißen Mäuse.": statement(
        "a small black cat", "see", "the small white mice"
    ),
    "I drink hot tea. | Ich trinke heißen Tee.": statement("I", "drink", "hot tea"),
    "Fresh milk is cheap. | Frische Milch ist billig.": statement("fresh milk", "be", predicate="cheap"),
    "She sings for two tired queens. | Sie singt für zwei müde Königinnen.": statement(
        "she", "sing", phrase="for two tired queens"
    ),
    "He dances with three small children. | Er tanzt mit drei kleinen Kindern.": statement(
        "he", "dance", phrase="with three small children"
    ),
    "The forest was dark. | Der Wald war dunkel.": statement("the forest", "be", predicate="dark", **PAST),
    "We buy my sister's expensive new car. | Wir kaufen das teure neue Auto meiner Schwester.": statement(
        "we", "buy", "my sister's expensive new car"
    ),
    "The teacher's dog follows the king's horses. | Der Hund des Lehrers folgt den Pferden des Königs.": statement(
        "the teacher's dog", "follow", "the king's horses"
    ),
    # Tenses, separable verbs, haben and sein
    "He ran. | Er ist gerannt.": statement("he", "run", **PAST),
    "You ate the apple. | Du hast den Apfel gegessen.": statement("you", "eat", "the apple", **PAST),
    "You forget us. | Du vergisst uns.": statement("you", "forget", "us"),
    "I had a dog. | Ich hatte einen Hund.": statement("I", "have", "a dog", **PAST),
    "The aunt invites him. | Die Tante lädt ihn ein.": statement("the aunt", "invite", "him"),
    "We called her. | Wir haben sie angerufen.": statement("we", "call", "her", **PAST),
    "The neighbor listens to me. | Der Nachbar hört mir zu.": statement("the neighbor", "listen to", "me"),
    "The bird woke up. | Der Vogel ist aufgewacht.": statement("the bird", "wake up", **PAST),
    "She followed them. | Sie ist ihnen gefolgt.": statement("she", "follow", "them", **PAST),
    # Two objects
    "They showed her the picture. | Sie haben ihr das Bild gezeigt.": statement(
        "they", "show", "the picture", indirect_object="her", **PAST
    ),
    # Modal verbs
    "The dog cannot catch the duck. | Der Hund kann die Ente nicht fangen.": statement(
        "the dog", "catch", "the duck", **CAN, **NOT
    ),
    "I do not want to wash the shirts. | Ich will die Hemden nicht waschen.": statement(
        "I", "wash", "the shirts", **WANT, **NOT
    ),
    "The soup should be hot. | Die Suppe sollte heiß sein.": statement("the soup", "be", predicate="hot", **SHOULD),
    # Prepositional phrases
    "The cow sleeps in the garden. | Die Kuh schläft im Garten.": statement("the cow", "sleep", phrase="in the garden"),
    "The pig waited on the bridge. | Das Schwein hat auf der Brücke gewartet.": statement(
        "the pig", "wait", phrase="on the bridge", **PAST
    ),
    "I go to the doctor. | Ich gehe zum Arzt.": statement("I", "go", phrase="to the doctor"),
    "The girls went to the old school. | Die Mädchen sind zur alten Schule gegangen.": statement(
        "the girls", "go", phrase="to the old school", **PAST
    ),
    "The men worked without me. | Die Männer haben ohne mich gearbeitet.": statement(
        "the men", "work", phrase="without me", **PAST
    ),
    # Verb-second after something else than the subject
    "Today the dog sees the cat. | Heute sieht der Hund die Katze.": statement(
        "the dog", "see", "the cat", front=lexicon.TODAY
    ),
    "Tomorrow the boys must call the teacher. | Morgen müssen die Jungen den Lehrer anrufen.": statement(
        "the boys", "call", "the teacher", front=lexicon.TOMORROW, **MUST
    ),
    "The bear often sleeps. | Der Bär schläft oft.": statement("the bear", "sleep", **OFTEN),
    "I am never sad. | Ich bin nie traurig.": statement("I", "be", predicate="sad", **NEVER),
    # Negation
    "The horse does not see the river. | Das Pferd sieht den Fluss nicht.": statement(
        "the horse", "see", "the river", **NOT
    ),
    "We did not buy a lamp. | Wir haben keine Lampe gekauft.": statement("we", "buy", "a lamp", **NOT, **PAST),
    "You do not drink coffee. | Du trinkst keinen Kaffee.": statement("you", "drink", "coffee", **NOT),
    "I do not help an old man. | Ich helfe keinem alten Mann.": statement("I", "help", "an old man", **NOT),
    "They do not sleep in the kitchen. | Sie schlafen nicht in der Küche.": statement(
        "they", "sleep", phrase="in the kitchen", **NOT
    ),
    "The books were not interesting. | Die Bücher waren nicht interessant.": statement(
        "the books", "be", predicate="interesting", **NOT, **PAST
    ),
    "No brave kings arrived. | Keine mutigen Könige sind angekommen.": statement("no brave kings", "arrive", **PAST),
    # Questions
    "Is the cat hungry? | Ist die Katze hungrig?": question("the cat", "be", predicate="hungry"),
    "Did the boy eat the cake? | Hat der Junge den Kuchen gegessen?": question("the boy", "eat", "the cake", **PAST),
    "Do you invite your aunt? | Lädst du deine Tante ein?": question("you", "invite", "your aunt"),
    "Does he want to go to the lake? | Will er zum See gehen?": question("he", "go", phrase="to the lake", **WANT),
    "Who opened the door? | Wer hat die Tür geöffnet?": question("who", "open", "the door", **PAST),
    "Why does the woman sometimes cry? | Warum weint die Frau manchmal?": question(
        "the woman", "cry", front=lexicon.WHY, **SOMETIMES
    ),
    "Where did you sleep? | Wo hast du geschlafen?": question("you", "sleep", front=lexicon.WHERE, **PAST),
    # Subordinate clauses
    "The dog sleeps because he is tired. | Der Hund schläft, weil er müde ist.": statement(
        "the dog", "sleep", subordinate=Subordinate(lexicon.BECAUSE, clause("he", "be", predicate="tired"))
    ),
    "When you call us, we dance. | Wenn du uns anrufst, tanzen wir.": statement(
        "we", "dance", front=Subordinate(lexicon.WHEN, clause("you", "call", "us"))
    ),
    "Although he lost her letter, she loves him. | Obwohl er ihren Brief verloren hat, liebt sie ihn.": statement(
        "she", "love", "him", front=Subordinate(lexicon.ALTHOUGH, clause("he", "lose", "her letter", **PAST))
    ),
    "I know that you cannot help me. | Ich weiß, dass du mir nicht helfen kannst.": statement(
        "I", SAY_OF["know"], subordinate=Subordinate(lexicon.THAT, clause("you", "help", "me", **CAN, **NOT))
    ),
    "The doctor said that the child swam. | Der Arzt hat gesagt, dass das Kind geschwommen ist.": statement(
        "the doctor", SAY_OF["say"], subordinate=Subordinate(lexicon.THAT, clause("the child", "swim", **PAST)), **PAST
    ),
    # Relative clauses
    "The dog that follows me is old. | Der Hund, der mir folgt, ist alt.": statement(
        phrase("the dog", relative=clause(who("dog"), "follow", "me")), "be", predicate="old"
    ),
    "We knew the woman whom you see. | Wir kannten die Frau, die du siehst.": statement(
        "we", "know", phrase("the woman", relative=clause("you", "see", who("woman"))), **PAST
    ),
    "She bought the dress that I found. | Sie hat das Kleid gekauft, das ich gefunden habe.": statement(
        "she", "buy", phrase("the dress", relative=clause("I", "find", who("dress"), **PAST)), **PAST
    ),
    "The children whom he listens to laugh. | Die Kinder, denen er zuhört, lachen.": statement(
        phrase("the children", relative=clause("he", "listen to", who("children"))), "laugh"
    ),
    # Coordination
    "The king and the queen sing. | Der König und die Königin singen.": statement("the king and the queen", "sing"),
    "I cook an egg and you take the bread. | Ich koche ein Ei und du nimmst das Brot.": statement(
        "I", "cook", "an egg", coordinated=(lexicon.AND, clause("you", "take", "the bread"))
    ),
    "The car is new, but he cries. | Das Auto ist neu, aber er weint.": statement(
        "the car", "be", predicate="new", coordinated=(lexicon.BUT, clause("he", "cry"))
    ),
}


@pytest.mark.parametrize("texts", GOLD)
def test_gold_sentences(texts):
    assert f"{to_english(GOLD[texts])} | {to_german(GOLD[texts])}" == texts


# Columns: masculine, feminine, neuter, plural. Rows: nominative, accusative, dative, genitive.
ARTICLES = [row.split() for row in ("der die das die", "den die das die", "dem der dem den", "des der des der")]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.english)
def test_a_noun_phrase_shows_its_case_once(noun):
    """The first word with an ending ends as the article does, adjectives after it in -e or -en."""
    for determiner, case, is_plural in product({*DETERMINERS.values(), lexicon.BARE}, Case, (False, True)):
        column = 3 if is_plural else noun.gender
        is_missing = (determiner.plural if is_plural else determiner.singular) is None or (
            is_plural and not noun.plural
        )
        if is_missing or (determiner is lexicon.BARE and case == Case.GENITIVE):
            continue
        adjective = ADJECTIVES[0]
        *article, described, word = german_nominal(NounPhrase(noun, determiner, is_plural, (adjective,)), case)
        has_weak_e = not is_plural and (case == 0 or (case == 1 and noun.gender != Gender.MASCULINE))
        definite = ARTICLES[case][column]
        strong = "e" if definite == "die" else definite.replace("das", "des")[1:]
        if determiner is lexicon.DEFINITE:
            assert article == [definite]
        elif article and article != [determiner.stem]:
            assert article == [determiner.stem + strong]
        else:
            assert described == adjective.stem + strong
        if article and article != [determiner.stem]:
            assert described == adjective.stem + ("e" if has_weak_e else "en")
        lemma = noun.german_plural if is_plural or (noun.is_weak and case) else noun.german
        is_genitive = case == Case.GENITIVE and not (is_plural or noun.is_weak or noun.gender == Gender.FEMININE)
        endings = ("s", "es") if is_genitive else ("", "n") if is_plural and case == Case.DATIVE else ("",)
        assert word in {lemma + ending for ending in endings}
        assert not (is_plural and case == Case.DATIVE) or word[-1] in "ns"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.infinitive)
def test_persons_of_the_present(verb):
    first, second, third, plural = (german_present(verb, slot) for slot in range(4))
    assert plural == verb.infinitive.rpartition("|")[2] and third == verb.third
    if not verb.present_forms:
        assert first == plural.removesuffix("n") or plural.endswith(("eln", "ern"))
        assert second.endswith("st") or second == third
        assert second.removesuffix("st") == third.removesuffix("t") or third[-2] in "sßz"


def test_du_keeps_one_s():
    assert [german_present(VERB_OF[verb], 1) for verb in ("eat", "close", "find", "open", "have", "be")] == [
        *("isst", "schließt", "findest", "öffnest", "hast", "bist")
    ]


def test_words_are_distinct_in_both_languages():
    assert all(noun.plural != noun.english for noun in NOUNS)
    assert all(verb.past != verb.english for verb in VERBS)
    assert len(NOUN_OF) == len({noun.german for noun in NOUNS}) + len({n.german for n in NOUNS if n.plural}) + 1
    assert len({word.english for word in ADJECTIVES}) == len({word.german for word in ADJECTIVES}) == len(ADJECTIVES)


def named(sentence: Sentence) -> set[tuple[str, str]]:
    return {(first.english, second.english) for first, second in combinations(sentence)}


def test_combinations_of_a_sentence():
    relative = clause("the old king", "buy", who("apple"))
    assert named(statement("the man and a boy", "eat", phrase("a red apple", relative=relative))) == {
        *(("man", "eat"), ("boy", "eat"), ("eat", "apple"), ("red", "apple")),
        *(("king", "buy"), ("buy", "apple"), ("old", "king")),
    }
    sentence = statement("I", "give", "a hat", indirect_object="the sick boy", phrase="in the dark forest")
    assert named(sentence) == {("give", "hat"), ("give", "boy"), ("sick", "boy"), ("dark", "forest")}
    sentence = statement(
        "she",
        "sing",
        front=Subordinate(lexicon.WHEN, clause("my red hat", "be", predicate="dirty")),
        coordinated=(lexicon.AND, clause("the dog", "run", phrase="to the big house")),
    )
    assert named(sentence) == {("red", "hat"), ("dirty", "hat"), ("dog", "run"), ("big", "house")}
    in_front = statement("we", "laugh", front=prepositional("in a small shop"))
    assert named(in_front) == {("small", "shop")}


def test_black_cat_is_held_out_in_every_form():
    cat, black = NOUN_OF["cat"][0], ADJECTIVE_OF["black"]
    assert split_of_combination((black, cat)) == "test"
    for sentence in (
        statement("I", "see", "two black cats"),
        statement("we", "laugh", subordinate=Subordinate(lexicon.BECAUSE, clause("cats", "be", predicate="black"))),
        statement("she", "sing", phrase="for my big black cat"),
    ):
        assert split_of_sentence(sentence) in ("test", None)
