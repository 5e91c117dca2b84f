"""The words of the demo corpus: a small English-German dictionary.

Every English word has one German counterpart. An entry gives what no rule derives: a noun its gender and plural, a verb its
principal parts (infinitive, third person singular, past participle), and the kinds of noun that go with it. `english` and
`german` derive the other forms.

English words whose form hides what German must know are absent: *sheep* (singular or plural), *read* (present or past), *it*
(gender of the antecedent). *You* is always one friend (*du*).
"""

from metaphrase.demo.grammar import (
    Adjective,
    Case,
    Declension,
    Determiner,
    Gender,
    Modal,
    Noun,
    Particle,
    Preposition,
    Pronoun,
    Verb,
)


def _rows(table: str) -> list[list[str]]:
    """Return the lines of a table as lists of cells; `_` is a blank inside a cell."""
    return [[cell.replace("_", " ") for cell in line.split()] for line in table.strip().splitlines()]


# Names in the tables for several kinds of noun.
_SORTS = {
    "living": ("person", "animal"),
    "food": ("fruit", "dish", "pastry"),
    "things": ("clothing", "text", "machine", "container", "object"),
    "places": ("building", "landscape", "water"),
}


def _kinds(names: list[str]) -> tuple[str, ...]:
    """Return kinds of noun, with sorts expanded."""
    return tuple(kind for name in names for kind in _SORTS.get(name, (name,)))


_GENDERS = {"m": Gender.MASCULINE, "f": Gender.FEMININE, "n": Gender.NEUTER}

# Nouns without a possessor.
_UNOWNED_KINDS = ("landscape", "water")
_UNOWNED = ("man", "woman", "boy", "girl", "king", "queen")

# English, plural, German, plural, gender (w: a weak masculine), kind, preposition of a place. "-": there is none.
NOUNS = tuple(
    Noun(
        english,
        None if plural == "-" else plural,
        german,
        None if german_plural == "-" else german_plural,
        _GENDERS["m" if gender == "w" else gender],
        kind,
        gender == "w",
        english not in _UNOWNED and kind not in _UNOWNED_KINDS,
        preposition[0] if preposition else None,
    )
    for english, plural, german, german_plural, gender, kind, *preposition in _rows("""
man        men         Mann        Männer       m  person
woman      women       Frau        Frauen       f  person
child      children    Kind        Kinder       n  person
boy        boys        Junge       Jungen       w  person
girl       girls       Mädchen     Mädchen      n  person
teacher    teachers    Lehrer      Lehrer       m  person
doctor     doctors     Arzt        Ärzte        m  person
student    students    Student     Studenten    w  person
neighbor   neighbors   Nachbar     Nachbarn     w  person
king       kings       König       Könige       m  person
queen      queens      Königin     Königinnen   f  person
mother     mothers     Mutter      Mütter       f  person
father     fathers     Vater       Väter        m  person
sister     sisters     Schwester   Schwestern   f  person
brother    brothers    Bruder      Brüder       m  person
aunt       aunts       Tante       Tanten       f  person
dog        dogs        Hund        Hunde        m  animal
cat        cats        Katze       Katzen       f  animal
horse      horses      Pferd       Pferde       n  animal
bird       birds       Vogel       Vögel        m  animal
cow        cows        Kuh         Kühe         f  animal
pig        pigs        Schwein     Schweine     n  animal
mouse      mice        Maus        Mäuse        f  animal
bear       bears       Bär         Bären        w  animal
monkey     monkeys     Affe        Affen        w  animal
duck       ducks       Ente        Enten        f  animal
apple      apples      Apfel       Äpfel        m  fruit
pear       pears       Birne       Birnen       f  fruit
cherry     cherries    Kirsche     Kirschen     f  fruit
egg        eggs        Ei          Eier         n  dish
potato     potatoes    Kartoffel   Kartoffeln   f  dish
soup       soups       Suppe       Suppen       f  dish
sausage    sausages    Wurst       Würste       f  dish
mushroom   mushrooms   Pilz        Pilze        m  dish
meat       -           Fleisch     -            n  dish
cake       cakes       Kuchen      Kuchen       m  pastry
cookie     cookies     Keks        Kekse        m  pastry
roll       rolls       Brötchen    Brötchen     n  pastry
bread      -           Brot        -            n  pastry
coffee     -           Kaffee      -            m  drink
tea        -           Tee         -            m  drink
milk       -           Milch       -            f  drink
water      -           Wasser      -            n  drink
juice      -           Saft        -            m  drink
hat        hats        Hut         Hüte         m  clothing
coat       coats       Mantel      Mäntel       m  clothing
shirt      shirts      Hemd        Hemden       n  clothing
dress      dresses     Kleid       Kleider      n  clothing
jacket     jackets     Jacke       Jacken       f  clothing
shoe       shoes       Schuh       Schuhe       m  clothing
book       books       Buch        Bücher       n  text
letter     letters     Brief       Briefe       m  text
postcard   postcards   Postkarte   Postkarten   f  text
car        cars        Auto        Autos        n  machine
bicycle    bicycles    Fahrrad     Fahrräder    n  machine
clock      clocks      Uhr         Uhren        f  machine
lamp       lamps       Lampe       Lampen       f  machine
box        boxes       Kiste       Kisten       f  container
bag        bags        Tasche      Taschen      f  container
suitcase   suitcases   Koffer      Koffer       m  container
door       doors       Tür         Türen        f  opening
window     windows     Fenster     Fenster      n  opening
ball       balls       Ball        Bälle        m  object
chair      chairs      Stuhl       Stühle       m  object
key        keys        Schlüssel   Schlüssel    m  object
knife      knives      Messer      Messer       n  object
cup        cups        Tasse       Tassen       f  object
umbrella   umbrellas   Regenschirm Regenschirme m  object
picture    pictures    Bild        Bilder       n  object
gift       gifts       Geschenk    Geschenke    n  object
house      houses      Haus        Häuser       n  building   in
kitchen    kitchens    Küche       Küchen       f  building   in
room       rooms       Zimmer      Zimmer       n  building   in
school     schools     Schule      Schulen      f  building   in
shop       shops       Laden       Läden        m  building   in
church     churches    Kirche      Kirchen      f  building   in
castle     castles     Schloss     Schlösser    n  building   in
garden     gardens     Garten      Gärten       m  landscape  in
forest     forests     Wald        Wälder       m  landscape  in
city       cities      Stadt       Städte       f  landscape  in
park       parks       Park        Parks        m  landscape  in
village    villages    Dorf        Dörfer       n  landscape  in
street     streets     Straße      Straßen      f  landscape  on
bridge     bridges     Brücke      Brücken      f  landscape  on
mountain   mountains   Berg        Berge        m  landscape  on
lake       lakes       See         Seen         m  water      in
river      rivers      Fluss       Flüsse       m  water      in
sea        seas        Meer        Meere        n  water      in
""")
)

_COLOURS = ("black", "white", "brown", "red", "green", "blue", "yellow")
_STATES = ("tired", "hungry", "happy", "sad", "sick", "friendly", "hot", "cold", "clean", "dirty", "quiet")

# English, German, stem before endings, then the kinds of noun.
ADJECTIVES = tuple(
    Adjective(english, german, stem, frozenset(_kinds(kinds)), english in _COLOURS, english in _STATES)
    for english, german, stem, *kinds in _rows("""
old         alt         alt         person animal things opening building landscape
young       jung        jung        person animal
big         groß        groß        person animal food clothing machine container object places
small       klein       klein       person animal food clothing machine container object places
new         neu         neu         clothing text machine container opening object building
beautiful   schön       schön       animal clothing text machine object places
ugly        hässlich    hässlich    animal clothing machine container object building
black       schwarz     schwarz     animal clothing machine container opening object
white       weiß        weiß        animal clothing machine container opening object
brown       braun       braun       animal clothing container opening object
red         rot         rot         fruit clothing machine container opening object
green       grün        grün        clothing machine container opening object
blue        blau        blau        clothing machine container opening object
yellow      gelb        gelb        clothing machine container opening object
tired       müde        müd         person animal
hungry      hungrig     hungrig     person animal
happy       glücklich   glücklich   person
sad         traurig     traurig     person animal
sick        krank       krank       person animal
clever      klug        klug        person animal
friendly    freundlich  freundlich  person animal
strong      stark       stark       person animal
brave       mutig       mutig       person animal
famous      berühmt     berühmt     person text building landscape
expensive   teuer       teur        food drink clothing machine container object
cheap       billig      billig      food drink clothing machine container object
hot         heiß        heiß        dish drink
cold        kalt        kalt        dish drink building water
fresh       frisch      frisch      food drink
sweet       süß         süß         fruit pastry drink
clean       sauber      sauber      clothing machine container opening object building water
dirty       schmutzig   schmutzig   animal clothing machine container opening object building water
broken      kaputt      kaputt      machine container opening
long        lang        lang        text
interesting interessant interessant text building landscape
dark        dunkel      dunkl       building landscape
quiet       ruhig       ruhig       places
dangerous   gefährlich  gefährlich  landscape water
""")
)


def _verbs(table: str, case: Case = Case.ACCUSATIVE, is_ditransitive: bool = False) -> tuple[Verb, ...]:
    """Return verbs from rows of: English, past, infinitive, third person, participle, auxiliary, subjects, objects, phrases.

    Kinds of noun are joined by `+`, "-" is none; `!` marks a phrase that the verb needs.
    """
    verbs = []
    for *forms, auxiliary, subjects, objects, phrase in _rows(table):
        objects = () if objects == "-" else _kinds(objects.split("+"))
        phrases = () if phrase == "-" else tuple(phrase.rstrip("!").split("+"))
        subjects = _kinds([subjects])
        verbs.append(Verb(*forms, auxiliary, case, subjects, objects, phrases, phrase.endswith("!"), is_ditransitive))
    return tuple(verbs)


INTRANSITIVE_VERBS = _verbs("""
sleep    slept    schlafen    schläft   geschlafen   haben  living  -  place
laugh    laughed  lachen      lacht     gelacht      haben  person  -  place+with
cry      cried    weinen      weint     geweint      haben  person  -  place
dance    danced   tanzen      tanzt     getanzt      haben  person  -  place+with+without
sing     sang     singen      singt     gesungen     haben  person  -  place+with+without+for
work     worked   arbeiten    arbeitet  gearbeitet   haben  person  -  place+with+without+for
wait     waited   warten      wartet    gewartet     haben  living  -  place+with
play     played   spielen     spielt    gespielt     haben  living  -  place+with+without
live     lived    wohnen      wohnt     gewohnt      haben  person  -  place!
swim     swam     schwimmen   schwimmt  geschwommen  sein   living  -  water+with+without
run      ran      rennen      rennt     gerannt      sein   living  -  to
go       went     gehen       geht      gegangen     sein   person  -  to!
come     came     kommen      kommt     gekommen     sein   living  -  to+with+without
arrive   arrived  an|kommen   kommt     angekommen   sein   person  -  with+without
wake_up  woke_up  auf|wachen  wacht     aufgewacht   sein   living  -  place
""")

TRANSITIVE_VERBS = _verbs("""
see         saw         sehen       sieht      gesehen      haben  living  living+things+places   place
hear        heard       hören       hört       gehört       haben  living  living                 place
find        found       finden      findet     gefunden     haben  living  living+things+food     place
look_for    looked_for  suchen      sucht      gesucht      haben  living  living+things          place
love        loved       lieben      liebt      geliebt      haben  person  living+places          -
visit       visited     besuchen    besucht    besucht      haben  person  person+places          with+without
call        called      an|rufen    ruft       angerufen    haben  person  person                 -
invite      invited     ein|laden   lädt       eingeladen   haben  person  person                 -
understand  understood  verstehen   versteht   verstanden   haben  person  person+text            -
catch       caught      fangen      fängt      gefangen     haben  living  animal                 place
buy         bought      kaufen      kauft      gekauft      haben  person  food+drink+things      for
sell        sold        verkaufen   verkauft   verkauft     haben  person  food+drink+things      place
eat         ate         essen       isst       gegessen     haben  person  food                   place+with
drink       drank       trinken     trinkt     getrunken    haben  person  drink                  place+with
cook        cooked      kochen      kocht      gekocht      haben  person  dish                   for
take        took        nehmen      nimmt      genommen     haben  person  food+things            -
carry       carried     tragen      trägt      getragen     haben  person  text+container+object  -
wear        wore        tragen      trägt      getragen     haben  person  clothing               -
wash        washed      waschen     wäscht     gewaschen    haben  person  clothing+animal+fruit  -
clean       cleaned     putzen      putzt      geputzt      haben  person  opening+building       -
draw        drew        zeichnen    zeichnet   gezeichnet   haben  person  living+places+object   for
repair      repaired    reparieren  repariert  repariert    haben  person  machine+opening        for
open        opened      öffnen      öffnet     geöffnet     haben  person  container+opening      for
close       closed      schließen   schließt   geschlossen  haben  person  container+opening      -
write       wrote       schreiben   schreibt   geschrieben  haben  person  text                   for
lose        lost        verlieren   verliert   verloren     haben  person  things                 place
forget      forgot      vergessen   vergisst   vergessen    haben  person  person+things          -
""")

DATIVE_VERBS = _verbs(
    """
help       helped       helfen     hilft      geholfen     haben  person  living  place
thank      thanked      danken     dankt      gedankt      haben  person  person  -
answer     answered     antworten  antwortet  geantwortet  haben  person  person  -
follow     followed     folgen     folgt      gefolgt      sein   living  living  -
listen_to  listened_to  zu|hören   hört       zugehört     haben  person  person  -
""",
    Case.DATIVE,
)

DITRANSITIVE_VERBS = _verbs(
    """
give   gave     geben     gibt     gegeben    haben  person  food+drink+things     -
show   showed   zeigen    zeigt    gezeigt    haben  person  things+animal+places  -
send   sent     schicken  schickt  geschickt  haben  person  things                -
bring  brought  bringen   bringt   gebracht   haben  person  food+drink+things     -
""",
    is_ditransitive=True,
)

# Verbs followed by a clause: *knows that ...*, *weiß, dass ...*
CLAUSE_VERBS = (
    Verb(
        *("know", "knew", "wissen", "weiß", "gewusst"),
        subjects=("person",),
        present_forms=("weiß", "weißt", "weiß", "wissen"),
        preterite_forms=("wusste", "wusstest", "wusste", "wussten"),
    ),
    *_verbs("""
believe  believed  glauben  glaubt  geglaubt  haben  person  -  -
say      said      sagen    sagt    gesagt    haben  person  -  -
hope     hoped     hoffen   hofft   gehofft   haben  person  -  -
"""),
)

KNOW = Verb(
    *("know", "knew", "kennen", "kennt", "gekannt"),
    subjects=("person",),
    objects=("person", "text", *_SORTS["places"]),
    preterite_forms=("kannte", "kanntest", "kannte", "kannten"),
)
HAVE = Verb(
    *("have", "had", "haben", "hat", "gehabt"),
    subjects=("person",),
    objects=("animal", *_SORTS["things"]),
    preterite_forms=("hatte", "hattest", "hatte", "hatten"),
)
BE = Verb(
    *("be", "was", "sein", "ist", "gewesen", "sein"),
    present_forms=("bin", "bist", "ist", "sind"),
    preterite_forms=("war", "warst", "war", "waren"),
)
VERBS = (*INTRANSITIVE_VERBS, *TRANSITIVE_VERBS, KNOW, HAVE, *DATIVE_VERBS, *DITRANSITIVE_VERBS, *CLAUSE_VERBS)

CAN, MUST, SHOULD, WANT = MODALS = (
    Modal("can", ("kann", "kannst", "kann", "können")),
    Modal("must", ("muss", "musst", "muss", "müssen"), negatable=False),
    Modal("should", ("sollte", "solltest", "sollte", "sollten")),
    Modal("want", ("will", "willst", "will", "wollen")),
)

DEFINITE = Determiner("the", "the", "d", Declension.WEAK)
THIS = Determiner("this", "these", "dies", Declension.WEAK)
EVERY = Determiner("every", None, "jed", Declension.WEAK)
INDEFINITE = Determiner("a", None, "ein", Declension.MIXED)
NO = Determiner("no", "no", "kein", Declension.MIXED)
POSSESSIVES = tuple(
    Determiner(english, english, stem, Declension.MIXED)
    for english, stem in _rows("my mein\nyour dein\nhis sein\nher ihr\nour unser\ntheir ihr")
)
NUMBERS = tuple(
    Determiner(None, english, german, Declension.STRONG) for english, german in _rows("two zwei\nthree drei\nfour vier")
)
BARE = Determiner("", "", "", Declension.STRONG)

PRONOUNS = (
    Pronoun("I", "me", ("ich", "mich", "mir"), 1),
    Pronoun("you", "you", ("du", "dich", "dir"), 2),
    Pronoun("he", "him", ("er", "ihn", "ihm")),
    Pronoun("she", "her", ("sie", "sie", "ihr")),
    Pronoun("we", "us", ("wir", "uns", "uns"), 1, True),
    Pronoun("they", "them", ("sie", "sie", "ihnen"), 3, True),
)
WHO = Pronoun("who", "whom", ("wer", "wen", "wem"))

PREPOSITIONS = {
    "with": Preposition("with", "mit", Case.DATIVE),
    "without": Preposition("without", "ohne", Case.ACCUSATIVE),
    "for": Preposition("for", "für", Case.ACCUSATIVE),
    "in": Preposition("in", "in", Case.DATIVE, (("dem", "im"),)),
    "on": Preposition("on", "auf", Case.DATIVE),
    "to": Preposition("to", "zu", Case.DATIVE, (("dem", "zum"), ("der", "zur"))),
}

TODAY, YESTERDAY, TOMORROW, NOW = (
    Particle(*row) for row in _rows("today heute\nyesterday gestern\ntomorrow morgen\nnow jetzt")
)
FREQUENCIES = tuple(Particle(*row) for row in _rows("often oft\nalways immer\nnever nie\nsometimes manchmal"))
WHY, WHERE, WHEN_QUESTION = (Particle(*row) for row in _rows("why warum\nwhere wo\nwhen wann"))
BECAUSE, ALTHOUGH, WHEN, THAT = (Particle(*row) for row in _rows("because weil\nalthough obwohl\nwhen wenn\nthat dass"))
AND, BUT = Particle("and", "und"), Particle(", but", ", aber")
