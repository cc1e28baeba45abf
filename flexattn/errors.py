"""Every exception raised on purpose: what was got, which rule it broke, what to do next.

The built-in exceptions that they derive from are those that torch's flex_attention raises in the
same place, so that a program which catches them goes on doing so.
"""

from __future__ import annotations


class FlexAttnError(Exception):
    """Base of all errors of this package.

    The message has three parts: what was got, and where known the rule it broke and what to do.
    """

    def __init__(self, got: str, rule: str = "", do: str = "") -> None:
        self.got, self.rule, self.do = got, rule, do
        lines = [got]
        if rule:
            lines.append(f"  rule: {rule}")
        if do:
            lines.append(f"  do:   {do}")
        super().__init__("\n".join(lines))


class InputError(FlexAttnError, ValueError):
    """A tensor, block mask or number passed to a public function does not fit the others."""


class InputTypeError(InputError, TypeError):
    """An argument is of a type that does not belong in its place."""


class LayoutError(InputError, NotImplementedError):
    """A tensor is nested, sparse, or has not four dimensions."""


class SlicedMaskError(InputError, RuntimeError):
    """A BlockMask was sliced, and has no mask_mod any more."""


class PlaceError(InputError, RuntimeError):
    """A device is none, or what one call reads lies on several."""


class ModError(FlexAttnError, RuntimeError):
    """A score_mod or mask_mod cannot be read as an expression; names the line of the function."""


class SignatureError(ModError, TypeError, ValueError):
    """A mod is not called as its kind is, or does not return what its kind does."""


class CaptureError(FlexAttnError, IndexError):
    """A score_mod or mask_mod reads a captured tensor outside of it, where that counts."""


class ConfigError(FlexAttnError, ValueError):
    """A kernel option or config cannot run for this problem on this device."""


class StalledError(FlexAttnError, RuntimeError):
    """A plan's launch waited in vain for what another program of it leaves; its rows are NaN."""


class UnsupportedError(FlexAttnError, NotImplementedError):
    """A valid request that this version or this device cannot serve."""


class NoKernelError(UnsupportedError, ModError):
    """A score_mod or mask_mod that no kernel here computes, and that plain torch may."""


class SettingsError(FlexAttnError):
    """An environment variable has a value that is not understood, or came too late."""


class RenderError(FlexAttnError):
    """A template could not be rendered: a fault of flexattn, not of the caller."""


class ArgumentError(FlexAttnError):
    """A kernel's arguments and what a launch gives do not match: a fault of flexattn."""


class BuildError(FlexAttnError):
    """No kernel could be built: the compiler or the loader refused; names the rendered source."""


class WrongKernelError(BuildError):
    """A problem's kernels compute other numbers than plain torch here, and none is left."""


class DriverError(BuildError):
    """The CUDA driver failed where a kernel is loaded; `word` is its name for the error."""

    def __init__(self, call: str, word: str = "") -> None:
        self.word = word
        super().__init__(f"{call} failed: {word}", "the CUDA driver can do it")


class CacheError(FlexAttnError):
    """A stored file is not what it should be; whoever looks a config up takes it for a miss."""

    @property
    def line(self) -> str:
        """The value that was got and the rule, for a warning of one line."""
        return f"{self.got} (rule: {self.rule})" if self.rule else self.got


class MeasureError(FlexAttnError):
    """Nothing of a problem can be measured."""


class DeviceError(MeasureError):
    """The device itself is at fault, whatever is asked of it next: its worker takes no more."""


class KernelError(FlexAttnError):
    """A kernel broke a rule of its hardware or language, as the NKI interpreter or lint saw."""
