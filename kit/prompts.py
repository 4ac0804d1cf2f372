"""Prompts of a known number of tokens, no two alike.

Every word here, with the blank before it or without, is one token of the byte-pair vocabularies in
common use (checked: SmolLM2's, GPT-3's, GPT-4's, GPT-4o's and Mistral's), so a prompt of n words has
n tokens there, plus the begin mark that some tokenizers add. The first words number the request, so
that a prefix cache finds nothing to share beyond chance.
"""

from __future__ import annotations

import numpy as np

_TEXT = """
ability access account action active age air animal answer area article author average bad base
basic begin below bill black book brain break built camp carbon case cause cells check city
clean clear code color company contact content context control cool correct cost country course
cover cross custom data day deep detail digital dog draw earth energy event extra eye face fall
family feed field file final fire fish flow focus foot force forest form free friend full fund
future gain game gas general give green ground group growth half hard head health healthy heart
heat help history hold home host hot hours house image input inside install issue job kind lab
land late law leading life light line lines link list local look love market mass meaning media
men mental method micro mind model modern money months mother music name named net network next
night normal objects offer order output outside pack page paper parent parts path patient pay
people places plant points policy port post primary program quality quick range rate reading
record red region request respect rest review risk road role rules safe search second select
service shape share short sign simple site size skin sleep slow soft soon sound source space
species stage stand states steps story strong student sun super surface system table talk target
tax team term text thing time tool tools top total town tree true try turn type unit user value
video view visual walk water week weight white wide wood word words work write writing written
year
"""
WORDS = tuple(_TEXT.split())
"""256 words, so that one stands for a byte."""

_ODD = 0x9E3779B1  # spreads neighbouring numbers over 32 bits, and none falls on another
_OTHER = 0x85EBCA6B
_THIRD = 0xC2B2AE35


def text(seed: int, index: int, tokens: int, run: int = 0) -> str:
    """A prompt of exactly `tokens` words for request `index` of the load with this seed.

    The first four words tell any 4 · 10⁹ indices apart, the next four the seeds and, a number from 0
    to 2³² − 1 as well, the runs; a shorter prompt differs from its neighbours as far as its words
    allow. The rest is drawn.
    """
    number = (index * _ODD + seed * _OTHER + run * _THIRD) % 2**32
    head = number.to_bytes(4, "little") + ((seed + run) % 2**32).to_bytes(4, "little")
    drawn = np.random.default_rng([seed, 1, index] + [run] * bool(run)).bytes(
        max(0, tokens - len(head))
    )
    return " ".join([WORDS[b] for b in (head + drawn)[:tokens]])
