"""Helpers shared by several tests: sentences."""

SENTENCES = [
    "A small dog runs across the wet grass.",
    "A small cat sleeps on the grass, as ever.",
    "Ein kleiner Hund läuft über das nasse Gras.",
    "Eine kleine Katze schläft wie immer im Gras!",
    "Größere Übungen: 12 + 30 = 42 <s> </s> #1",
] * 4
