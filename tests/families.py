"""What a config's own family says of it, and all families of a problem, in one call."""

from flexattn.kernels.choose.defaults import refused
from flexattn.kernels.choose.registry import by_language, families, family_of


def render(structure, config, device, title):
    return family_of(config).render(structure, config, device, title)


def geometry(problem, config, device):
    return family_of(config).grid(problem, config, device)


def fit_to_mask(config, structure):
    return family_of(config).fit_to_mask(config, structure)


def violated(config, structure, device):
    return family_of(config).limits.violated(config, structure, device)


def unpromising(config, structure, device):
    return family_of(config).limits.unpromising(config, structure, device)


def estimates(config, structure, device):
    return family_of(config).limits.resources(config, structure, device)


def preferences(problem, device, language):
    return by_language(problem.structure.kind, language, device).defaults(problem, device)


def grid(problem, device, effort):
    for family in families(problem.structure.kind, device):
        yield from family.axes(problem, device, effort)


def gluon_refused(problem, device):
    return refused(problem, device, "gluon")
