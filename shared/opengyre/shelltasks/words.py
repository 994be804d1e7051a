"""Vocabulary of the shell tasks, split once and for all.

Invariant: a word or a file stem is in the training lists or in the reserved lists, never in both, and words and stems
have nothing in common. An evaluation task is written with reserved entries only, so a policy that solves it can copy
text that it was never trained on. Training tasks use invented words as well, never a reserved one: with the lists
alone a policy learns the lists by heart and not to copy.
"""

import random
from functools import cache
from typing import Final

TRAIN_WORDS: Final = tuple(
    """
    acorn amber anchor apple april arrow autumn badge bagel bamboo banjo barley basil beach bean bell berry birch
    blanket bloom border bottle branch bread brick bridge brook bubble bucket butter button cabin cable cactus camel
    canal candle candy canyon carbon carrot castle cedar cello chain chalk cherry chess circle clay cliff clock cloud
    clover coast cobalt comet copper coral cotton crane creek cricket crown crystal daisy delta desert dragon eagle
    ember falcon feather fern flame flint flute forest fossil fox frost garden garlic ginger glacier globe grape
    gravel guitar hammer harbor hazel helmet heron honey indigo island ivory jacket jaguar jasmine kettle kitten
    ladder lagoon lantern lemon lilac linen lobster lotus magnet mango maple marble meadow melon meteor mint mirror
    monkey mosaic needle nickel oasis ocean olive onion orbit orchid otter oyster paddle panda paper parrot pearl
    pepper piano pillow pine planet plum pocket pond poppy prism puzzle quartz rabbit radish raven ribbon river robin
    rocket rose saddle salmon sand sapphire shell silver spider sponge stone storm sugar summer sunset swan tango
    temple thunder tiger timber toast tomato torch trumpet tulip tunnel turtle valley velvet violet violin walnut
    water whale willow window winter wolf yellow zebra
    """.split()  # noqa: SIM905 - a list literal of this would be unreadable
)

EVAL_WORDS: Final = tuple(
    """
    almond arctic beetle blossom bonfire cabbage canvas carpet chestnut cinder cocoa compass cottage crater dolphin
    elm ferret fiddle galaxy goblet hornet icicle juniper lark lizard lunar marlin mustard nectar nutmeg opal pebble
    penguin pigeon rainbow saffron scarlet sparrow spruce sunrise teapot thistle topaz tundra vanilla walrus
    """.split()  # noqa: SIM905 - a list literal of this would be unreadable
)

TRAIN_STEMS: Final = tuple(
    """
    account agenda alarm album answer archive article atlas backup ballot batch bill binder board booking
    brief budget bundle cache calendar caption cargo catalog census chapter chart checks claims client code column
    contact contract course credit daily data deals debate debt diary digest docket draft duty entry errors essay
    event exam export facts field figure final folder form fund goals grades graph guest guide header history
    hours index info input invoice items journal kit label later ledger lesson letter limits list lookup lot
    mail manual mark match memo menu message metric minute model month names news note notice number offer old order
    output page parcel parts pass patch payment people phone photo plan poem point policy poster price print profile
    project prompt quarter query quota quote rates readme recipe record report result review roster route rules
    sales sample schema score script search serial shift sheet signal sketch source speech staff state stock story
    study summary survey table target tasks tax team temp term test text theme ticket title todo total trace trip
    update upload usage value visit vote week work yearly zone
    """.split()  # noqa: SIM905 - a list literal of this would be unreadable
)

EVAL_STEMS: Final = tuple(
    """
    address basket blog bonus carton closing cover deposit detail drill fiscal formula gallery handout hotel inbox
    inquiry lecture library licence margin merger motion notepad outline packet patent permit picture portal ranking
    receipt refund rental request salary section seminar session storage tariff testing tracker transfer voucher
    """.split()  # noqa: SIM905 - a list literal of this would be unreadable
)

SUFFIXES: Final = (".txt", ".log", ".md", ".csv")

_SHORTEST: Final = 3
_LONGEST: Final = 9


@cache
def _followers() -> dict[str, str]:
    """Two letters -> the letters that follow them in the training lists; `^` begins a word and `$` ends it."""
    followers: dict[str, str] = {}
    for word in (*TRAIN_WORDS, *TRAIN_STEMS):
        text = f"^^{word}$"
        for at in range(len(text) - 2):
            followers[text[at : at + 2]] = followers.get(text[at : at + 2], "") + text[at + 2]
    return followers


@cache
def _reserved() -> frozenset[str]:
    return frozenset((*EVAL_WORDS, *EVAL_STEMS))


def invent(rng: random.Random) -> str:
    """A word that looks like the training words, of 3 to 9 letters, never a reserved one."""
    while True:
        text = "^^"
        while text[-1] != "$" and len(text) < _LONGEST + 3:
            text += rng.choice(_followers()[text[-2:]])
        word = text[2:].rstrip("$")
        if text[-1] == "$" and _SHORTEST <= len(word) <= _LONGEST and word not in _reserved():
            return word
