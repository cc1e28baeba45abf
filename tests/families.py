"""What a config's own family says of it, and all families of a problem, in one call."""

from sympy import sympify

from flexattn.kernels.choose.defaults import refused
from flexattn.kernels.choose.registry import by_language, families, family_of


def render(structure, config, device, title):
    return family_of(config).render(structure, config, device, title)


def geometry(problem, config, device):
    return family_of(config).grid(problem, config, device)


def fit_to_mask(config, structure):
    return family_of(config).fit_to_mask(config, structure)


def violated(config, structure, device):
    return family_of(config).feasibility.violated(config, structure, device)


def unpromising(config, structure, device):
    return family_of(config).feasibility.unpromising(config, structure, device)


def estimates(config, structure, device):
    return family_of(config).feasibility.resources(config, structure, device)


def numbers(config, structure, device):
    return family_of(config).feasibility.numbers(config, structure, device)


def preferences(problem, device, language):
    return by_language(problem.structure.kind, language).defaults(problem, device)


def grid(problem, device, effort):
    for family in families(problem.structure.kind, device):
        yield from family.axes(problem, device, effort)


def gluon_refused(problem, device):
    return refused(problem, device, "gluon")


def exact(formula, known):
    """The value of a stated formula for a case, by sympy's own arithmetic."""
    found = dict(known)
    for step in formula.steps:
        found[step.symbol] = valued(step.value, found)
    return valued(formula.value, found)


def valued(expression, known):
    """An expression whose symbols are known, by sympy's own arithmetic.

    By xreplace: to rebuild an expression evaluates it as `subs` does, in a fifth of the time.
    """
    return expression.xreplace({symbol: sympify(value) for symbol, value in known.items()})
