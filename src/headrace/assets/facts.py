"""Documents that state codes ('The code of Lisbon is 4821.') among other text, and the questions about them.

Pure Python. The demo, the tests and the training of the tiny model all draw from here.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

CITIES = """
Aberdeen Accra Adelaide Algiers Almaty Amman Amsterdam Ankara Antwerp Atlanta Auckland Baghdad Baku Bangkok
Barcelona Basel Beirut Belfast Belgrade Bergen Berlin Bilbao Bogota Bologna Bombay Boston Bremen Brisbane Bristol
Brussels Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Chicago Cologne Copenhagen Cordoba Cork Cracow Dakar
Dallas Delhi Denver Detroit Dhaka Dresden Dublin Dubrovnik Durban Edinburgh Florence Frankfurt Galway Gdansk Geneva
Genoa Ghent Glasgow Gothenburg Granada Graz Grenoble Hamburg Hanoi Hanover Harare Havana Helsinki Hobart Honolulu
Houston Innsbruck Istanbul Izmir Jakarta Kabul Kampala Karachi Kathmandu Khartoum Kiev Kigali Kingston Kyoto Lagos
Lahore Leeds Leipzig Lima Linz Lisbon Liverpool Ljubljana London Luanda Lucerne Lusaka Lyon Madrid Malaga Managua
Manchester Manila Maputo Marseille Melbourne Miami Milan Minsk Montevideo Montreal Moscow Mumbai Munich Nagoya
Nairobi Nantes Naples Nashville Newcastle Nice Nicosia Odessa Osaka Oslo Ottawa Oxford Palermo Panama Paris Perth
Phoenix Pisa Porto Portland Prague Pretoria Quebec Quito Rabat Reykjavik Riga Rotterdam Salzburg Santiago Sarajevo
Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Strasbourg Stuttgart Sydney Taipei Tallinn Tampere Tashkent
Tbilisi Tehran Tirana Tokyo Toledo Toronto Toulouse Trieste Tripoli Tunis Turin Utrecht Valencia Vancouver Venice
Verona Vienna Vilnius Warsaw Wellington Winnipeg Yerevan York Zagreb Zurich
"""

PEOPLE = """
Albert Alice Amelia Anita Arthur Audrey Beatrice Bernard Bridget Camilla Carlos Cecilia Charlotte Clara Colin Conrad
Cyril Doris Edith Edmund Eleanor Elsa Emily Ernest Fatima Felicity Fiona Florian Gerald Gilbert Greta Harold
Harriet Hector Helga Henry Hilda Hugo Ingrid Irene Isabel Jasper Julian Katrin Laura Leonard Lionel Louisa Mabel Marcel
Matilda Maxwell Nadia Nigel Olga Oscar Pamela Percy Quentin Ralph Regina Rupert Sabina Sigrid Stella Sylvia Theodore
Ursula Valerie Victor Wanda Winifred Yvonne
"""

NAMES: tuple[str, ...] = tuple(sorted((CITIES + PEOPLE).split()))
"""The names whose codes are asked for. Each is one token of the tiny model's tokenizer (with a space before it)."""

CHARS_PER_TOKEN = 3.5  # of the filler text; measured on the tiny model's tokenizer
TOKENS_PER_FACT = 10


def fact_sentence(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def question(name: str) -> str:
    return f"What is the code of {name}?"


def draw_facts(rng: random.Random, n_facts: int, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """Distinct names, each with a code of four digits."""
    if n_facts > len(names):
        raise ValueError(f"{n_facts} facts were asked for, but there are only {len(names)} names; ask for fewer")
    return {name: f"{rng.randrange(10_000):04d}" for name in rng.sample(names, n_facts)}


def filler() -> str:
    """About 20 kB of public-domain English: Ruth and Jonah, King James Version. The tiny model never trained on it."""
    return Path(__file__).with_name("filler.txt").read_text(encoding="utf-8")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.?!])\s+", text.strip())


def fact_document(
    rng: random.Random, n_facts: int, n_tokens_hint: int, text: str | None = None
) -> tuple[str, dict[str, str]]:
    """`n_facts` facts scattered over running text of about `n_tokens_hint` tokens in all, and the facts by name.

    The text starts at a random sentence and repeats from its beginning when it runs out. A hint too small for the
    facts themselves gives the facts alone.
    """
    facts = draw_facts(rng, n_facts)
    budget = int((n_tokens_hint - TOKENS_PER_FACT * n_facts) * CHARS_PER_TOKEN)
    body = _running_text(rng, sentences(filler() if text is None else text), budget)
    for name, code in facts.items():
        body.insert(rng.randrange(len(body) + 1), fact_sentence(name, code))
    return " ".join(body), facts


def _running_text(rng: random.Random, source: list[str], n_chars: int) -> list[str]:
    """Whole sentences in order, as many as fit in `n_chars`."""
    at, out = rng.randrange(len(source)), []
    while n_chars >= len(source[at % len(source)]):
        out.append(source[at % len(source)])
        n_chars -= len(out[-1]) + 1
        at += 1
    return out
