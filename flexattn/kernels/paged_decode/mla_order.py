"""In which order the two warpgroups of an MLA program multiply: what is awaited when.

A tile of one warpgroup is eight steps:

first, rest   scores of its keys are asked for, by the quarter of columns that it will multiply as
              values, and by the other quarter
scores        they are there
other         the other warpgroup's weights are awaited, and their product with values asked for
its_values    that product is there: its quarter of keys may be overwritten
top           maxima
weigh         weights, which are published
own           their product with its own keys' values is asked for
own_values    that product is there: its quarter of keys may be overwritten

A loop over tiles turns where no product is under way: ptxas lets no sum go round beside one.
"""

from __future__ import annotations

from dataclasses import dataclass

# Products that each of these asks for and waits for.
_ASKS = {"F": "scores", "G": "scores", "O": "other", "W": "own"}
_AWAITS = {"s": "scores", "o": "other", "w": "own"}
_NAMES = {
    "F": "first", "G": "rest", "s": "scores", "O": "other", "o": "its_values", "t": "top",
    "x": "weigh", "W": "own", "w": "own_values",
}  # fmt: skip
# Of the first keys' warpgroup and of the second one's; the loop turns at the bar.
#
# alternate   the other one's product stands between the parts of the scores
# apart       one has its scores before it awaits the other one's weights, the other one multiplies
#             these first: while one weighs, the other one's scores are multiplied
# ahead       the same, the warpgroups exchanged
# together    the first one multiplies what the second one has weighed as its tile ends
ORDERS = {
    "alternate": ("FOGostx|Ww", "FOGostx|Ww"),
    "apart": ("FGsOtxo|Ww", "OFoGs|txWw"),
    "ahead": ("OFoGs|txWw", "FGsOtxo|Ww"),
    "together": ("FGs|txWwOo", "FGsOtxo|Ww"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One of a warpgroup's steps.

    pending: groups of instructions that may be under way where it has waited. late: the weights
    that it multiplies are those of the tile before.
    """

    name: str
    pending: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """A warpgroup's steps of a tile, cut where its loop turns.

    late: the other one's last weights are left when the loop has ended.
    """

    before: tuple[Step, ...]
    after: tuple[Step, ...]
    late: bool


def walk(order: str, w: int, pieces: int) -> Walk:
    """What warpgroup w does, scores coming in so many pieces of a quarter."""
    told = ORDERS[order][w]
    letters = told.replace("|", "")
    late = w == 0 and letters.index("O") < letters.index("x")
    steps = [_step(letters, i, pieces, late) for i in range(len(letters))]
    turn = told.index("|")
    return Walk(tuple(steps[:turn]), tuple(steps[turn:]), late)


def _step(letters: str, at: int, pieces: int, late: bool) -> Step:
    letter = letters[at]
    pending = 0
    if letter in _AWAITS:
        asked = [i for i in range(at) if _ASKS.get(letters[i]) == _AWAITS[letter]]
        groups = {"F": pieces, "G": pieces + 1, "O": 1, "W": 1}
        pending = sum(groups.get(each, 0) for each in letters[asked[-1] + 1 : at])
    return Step(_NAMES[letter], pending, late and letter in "Oo")
