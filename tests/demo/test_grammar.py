"""The grammar of the demo corpus: English and German examples by hand, and held-out combinations."""

import pytest
from demo_phrases import ADJECTIVE_OF, NOUN_OF, SAY_OF, clause, phrase, prepositional, question, statement, who

from metaphrase.demo import lexicon
from metaphrase.demo.corpus import combinations, split_of_combination, split_of_sentence
from metaphrase.demo.english import to_english
from metaphrase.demo.german import to_german
from metaphrase.demo.grammar import Sentence, Subordinate

PAST, NOT = {"is_past": True}, {"is_negated": True}
CAN, MUST, SHOULD, WANT = ({"modal": modal} for modal in lexicon.MODALS)
OFTEN, ALWAYS, NEVER, SOMETIMES = ({"frequency": adverb} for adverb in lexicon.FREQUENCIES)

GOLD = [
    # Cases, genders, articles
    (statement("the cat", "be", predicate="black"), "The cat is black.", "Die Katze ist schwarz."),
    (statement("the dog", "see", "the cat"), "The dog sees the cat.", "Der Hund sieht die Katze."),
    (statement("the cat", "see", "the dog"), "The cat sees the dog.", "Die Katze sieht den Hund."),
    (statement("a boy", "help", "the children"), "A boy helps the children.", "Ein Junge hilft den Kindern."),
    (statement("the girl", "thank", "the boy"), "The girl thanks the boy.", "Das Mädchen dankt dem Jungen."),
    (statement("every king", "love", "my book"), "Every king loves my book.", "Jeder König liebt mein Buch."),
    (statement("these ducks", "sleep"), "These ducks sleep.", "Diese Enten schlafen."),
    # Adjectives
    (
        statement("the old man", "buy", "an ugly umbrella"),
        "The old man buys an ugly umbrella.",
        "Der alte Mann kauft einen hässlichen Regenschirm.",
    ),
    (
        statement("a small black cat", "see", "the small white mice"),
        "A small black cat sees the small white mice.",
        "Eine kleine schwarze Katze sieht die kleinen weißen Mäuse.",
    ),
    (statement("I", "drink", "hot tea"), "I drink hot tea.", "Ich trinke heißen Tee."),
    (statement("fresh milk", "be", predicate="cheap"), "Fresh milk is cheap.", "Frische Milch ist billig."),
    (
        statement("she", "sing", phrase="for two tired queens"),
        "She sings for two tired queens.",
        "Sie singt für zwei müde Königinnen.",
    ),
    (
        statement("he", "dance", phrase="with three small children"),
        "He dances with three small children.",
        "Er tanzt mit drei kleinen Kindern.",
    ),
    (statement("the forest", "be", predicate="dark", **PAST), "The forest was dark.", "Der Wald war dunkel."),
    (
        statement("we", "buy", "my sister's expensive new car"),
        "We buy my sister's expensive new car.",
        "Wir kaufen das teure neue Auto meiner Schwester.",
    ),
    (
        statement("the teacher's dog", "follow", "the king's horses"),
        "The teacher's dog follows the king's horses.",
        "Der Hund des Lehrers folgt den Pferden des Königs.",
    ),
    # Tenses, separable verbs, haben and sein
    (statement("he", "run", **PAST), "He ran.", "Er ist gerannt."),
    (statement("you", "eat", "the apple", **PAST), "You ate the apple.", "Du hast den Apfel gegessen."),
    (statement("you", "forget", "us"), "You forget us.", "Du vergisst uns."),
    (statement("I", "have", "a dog", **PAST), "I had a dog.", "Ich hatte einen Hund."),
    (statement("the aunt", "invite", "him"), "The aunt invites him.", "Die Tante lädt ihn ein."),
    (statement("we", "call", "her", **PAST), "We called her.", "Wir haben sie angerufen."),
    (statement("the neighbor", "listen to", "me"), "The neighbor listens to me.", "Der Nachbar hört mir zu."),
    (statement("the bird", "wake up", **PAST), "The bird woke up.", "Der Vogel ist aufgewacht."),
    (statement("she", "follow", "them", **PAST), "She followed them.", "Sie ist ihnen gefolgt."),
    # Two objects
    (
        statement("they", "show", "the picture", indirect_object="her", **PAST),
        "They showed her the picture.",
        "Sie haben ihr das Bild gezeigt.",
    ),
    # Modal verbs
    (
        statement("the dog", "catch", "the duck", **CAN, **NOT),
        "The dog cannot catch the duck.",
        "Der Hund kann die Ente nicht fangen.",
    ),
    (
        statement("I", "wash", "the shirts", **WANT, **NOT),
        "I do not want to wash the shirts.",
        "Ich will die Hemden nicht waschen.",
    ),
    (statement("the soup", "be", predicate="hot", **SHOULD), "The soup should be hot.", "Die Suppe sollte heiß sein."),
    # Prepositional phrases
    (
        statement("the cow", "sleep", phrase="in the garden"),
        "The cow sleeps in the garden.",
        "Die Kuh schläft im Garten.",
    ),
    (
        statement("the pig", "wait", phrase="on the bridge", **PAST),
        "The pig waited on the bridge.",
        "Das Schwein hat auf der Brücke gewartet.",
    ),
    (statement("I", "go", phrase="to the doctor"), "I go to the doctor.", "Ich gehe zum Arzt."),
    (
        statement("the girls", "go", phrase="to the old school", **PAST),
        "The girls went to the old school.",
        "Die Mädchen sind zur alten Schule gegangen.",
    ),
    (
        statement("the men", "work", phrase="without me", **PAST),
        "The men worked without me.",
        "Die Männer haben ohne mich gearbeitet.",
    ),
    # Verb-second after something else than the subject
    (
        statement("the dog", "see", "the cat", front=lexicon.TODAY),
        "Today the dog sees the cat.",
        "Heute sieht der Hund die Katze.",
    ),
    (
        statement("the boys", "call", "the teacher", front=lexicon.TOMORROW, **MUST),
        "Tomorrow the boys must call the teacher.",
        "Morgen müssen die Jungen den Lehrer anrufen.",
    ),
    (statement("the bear", "sleep", **OFTEN), "The bear often sleeps.", "Der Bär schläft oft."),
    (statement("I", "be", predicate="sad", **NEVER), "I am never sad.", "Ich bin nie traurig."),
    # Negation
    (
        statement("the horse", "see", "the river", **NOT),
        "The horse does not see the river.",
        "Das Pferd sieht den Fluss nicht.",
    ),
    (statement("we", "buy", "a lamp", **NOT, **PAST), "We did not buy a lamp.", "Wir haben keine Lampe gekauft."),
    (statement("you", "drink", "coffee", **NOT), "You do not drink coffee.", "Du trinkst keinen Kaffee."),
    (statement("I", "help", "an old man", **NOT), "I do not help an old man.", "Ich helfe keinem alten Mann."),
    (
        statement("they", "sleep", phrase="in the kitchen", **NOT),
        "They do not sleep in the kitchen.",
        "Sie schlafen nicht in der Küche.",
    ),
    (
        statement("the books", "be", predicate="interesting", **NOT, **PAST),
        "The books were not interesting.",
        "Die Bücher waren nicht interessant.",
    ),
    (statement("no brave kings", "arrive", **PAST), "No brave kings arrived.", "Keine mutigen Könige sind angekommen."),
    # Questions
    (question("the cat", "be", predicate="hungry"), "Is the cat hungry?", "Ist die Katze hungrig?"),
    (question("the boy", "eat", "the cake", **PAST), "Did the boy eat the cake?", "Hat der Junge den Kuchen gegessen?"),
    (question("you", "invite", "your aunt"), "Do you invite your aunt?", "Lädst du deine Tante ein?"),
    (question("he", "go", phrase="to the lake", **WANT), "Does he want to go to the lake?", "Will er zum See gehen?"),
    (question("who", "open", "the door", **PAST), "Who opened the door?", "Wer hat die Tür geöffnet?"),
    (
        question("the woman", "cry", front=lexicon.WHY, **SOMETIMES),
        "Why does the woman sometimes cry?",
        "Warum weint die Frau manchmal?",
    ),
    (question("you", "sleep", front=lexicon.WHERE, **PAST), "Where did you sleep?", "Wo hast du geschlafen?"),
    # Subordinate clauses
    (
        statement("the dog", "sleep", subordinate=Subordinate(lexicon.BECAUSE, clause("he", "be", predicate="tired"))),
        "The dog sleeps because he is tired.",
        "Der Hund schläft, weil er müde ist.",
    ),
    (
        statement("we", "dance", front=Subordinate(lexicon.WHEN, clause("you", "call", "us"))),
        "When you call us, we dance.",
        "Wenn du uns anrufst, tanzen wir.",
    ),
    (
        statement(
            "she", "love", "him", front=Subordinate(lexicon.ALTHOUGH, clause("he", "lose", "her letter", **PAST))
        ),
        "Although he lost her letter, she loves him.",
        "Obwohl er ihren Brief verloren hat, liebt sie ihn.",
    ),
    (
        statement(
            "I", SAY_OF["know"], subordinate=Subordinate(lexicon.THAT, clause("you", "help", "me", **CAN, **NOT))
        ),
        "I know that you cannot help me.",
        "Ich weiß, dass du mir nicht helfen kannst.",
    ),
    (
        statement(
            "the doctor",
            SAY_OF["say"],
            subordinate=Subordinate(lexicon.THAT, clause("the child", "swim", **PAST)),
            **PAST,
        ),
        "The doctor said that the child swam.",
        "Der Arzt hat gesagt, dass das Kind geschwommen ist.",
    ),
    # Relative clauses
    (
        statement(phrase("the dog", relative=clause(who("dog"), "follow", "me")), "be", predicate="old"),
        "The dog that follows me is old.",
        "Der Hund, der mir folgt, ist alt.",
    ),
    (
        statement("we", "know", phrase("the woman", relative=clause("you", "see", who("woman"))), **PAST),
        "We knew the woman whom you see.",
        "Wir kannten die Frau, die du siehst.",
    ),
    (
        statement("she", "buy", phrase("the dress", relative=clause("I", "find", who("dress"), **PAST)), **PAST),
        "She bought the dress that I found.",
        "Sie hat das Kleid gekauft, das ich gefunden habe.",
    ),
    (
        statement(phrase("the children", relative=clause("he", "listen to", who("children"))), "laugh"),
        "The children whom he listens to laugh.",
        "Die Kinder, denen er zuhört, lachen.",
    ),
    # Coordination
    (statement("the king and the queen", "sing"), "The king and the queen sing.", "Der König und die Königin singen."),
    (
        statement("I", "cook", "an egg", coordinated=(lexicon.AND, clause("you", "take", "the bread"))),
        "I cook an egg and you take the bread.",
        "Ich koche ein Ei und du nimmst das Brot.",
    ),
    (
        statement("the car", "be", predicate="new", coordinated=(lexicon.BUT, clause("he", "cry"))),
        "The car is new, but he cries.",
        "Das Auto ist neu, aber er weint.",
    ),
]


@pytest.mark.parametrize(("sentence", "english", "german"), GOLD, ids=[english for _, english, _ in GOLD])
def test_gold_sentences(sentence, english, german):
    assert (to_english(sentence), to_german(sentence)) == (english, german)


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
