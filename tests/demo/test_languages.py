from metaphrase.demo.corpus import Sampler
from metaphrase.demo.languages import to_english, to_german

GOLD = """\
No old man lives in the forests. | Kein alter Mann wohnt in den Wäldern.
Our big child sang on the mountain. | Unser großes Kind hat auf dem Berg gesungen.
His aunt and my children often went to the castle. | Seine Tante und meine Kinder sind oft zum Schloss gegangen.
The boy and this girl went to a sad neighbor. | Der Junge und dieses Mädchen sind zu einem traurigen Nachbarn gegangen.
The happy men show her this mouse. | Die glücklichen Männer zeigen ihr diese Maus.
Today the woman brings the doctor's child my lamps. | Heute bringt die Frau dem Kind des Arztes meine Lampen.
Now they help the brown mice. | Jetzt helfen sie den braunen Mäusen.
I hope that their aunts do not drink coffee. | Ich hoffe, dass ihre Tanten keinen Kaffee trinken.
She did not swim in the river. | Sie ist nicht im Fluss geschwommen.
The famous queens knew that I listened to her. | Die berühmten Königinnen wussten, dass ich ihr zugehört habe.
She answers the tired boy because my mother cannot sleep. | Sie antwortet dem müden Jungen, weil meine Mutter nicht schlafen kann.
Because we found her, she slept. | Weil wir sie gefunden haben, hat sie geschlafen.
When this egg is hot, the duck does not come. | Wenn dieses Ei heiß ist, kommt die Ente nicht.
You run to the park and they clean an ugly shop. | Du rennst zum Park und sie putzen einen hässlichen Laden.
She carried the umbrella, but the child was old. | Sie hat den Regenschirm getragen, aber das Kind war alt.
Where does the girl eat their sweet cookie? | Wo isst das Mädchen ihren süßen Keks?
Who buys the small green knives? | Wer kauft die kleinen grünen Messer?
Why did I answer her young sister? | Warum habe ich ihrer jungen Schwester geantwortet?
The queen who buys suitcases laughs. | Die Königin, die Koffer kauft, lacht.
The boy carried the umbrella that her aunts took. | Der Junge hat den Regenschirm getragen, den ihre Tanten genommen haben.
This small king should not arrive without him. | Dieser kleine König sollte nicht ohne ihn ankommen.
Every happy woman should carry the white chairs. | Jede glückliche Frau sollte die weißen Stühle tragen."""


def test_sentences_of_every_construction():
    gold = dict(line.split(" | ") for line in GOLD.splitlines())
    sampler, drawn = Sampler(11), {}
    for _ in range(1500):
        sentence = sampler.sentence()
        if (english := to_english(sentence)) in gold:
            drawn[english] = to_german(sentence)
    assert drawn == gold
