"""Entry points of pyproject.toml that vLLM and SGLang call in each of their processes."""

from __future__ import annotations

from typing import Any

from flexattn.settings import log

_NAME = "flexattn"
_VLLM_BACKEND = "flexattn.integrations.vllm.FlexattnBackend"


def register_vllm() -> None:
    """Let --attention-backend CUSTOM be this library; a second call changes nothing.

    Where another plug-in has the name already, or vLLM has no registry of backends, a warning
    says so: this runs in every vLLM that finds the package, whatever backend it serves with.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        taken = custom.is_overridden() and custom.get_path()
    except (ImportError, AttributeError) as error:
        log.warning("attention backends cannot be registered with this vLLM: %s", error)
        return
    if not taken:
        register_backend(custom, _VLLM_BACKEND)
    elif taken != _VLLM_BACKEND:
        log.warning("vLLM's CUSTOM attention backend is %s, not flexattn", taken)


def register_sglang() -> None:
    """Let --attention-backend flexattn be this library; a second call changes nothing.

    SGLang logs what this raises, and goes on without.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # up to 0.5.19
        from sglang.srt import server_args as choices

    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if _NAME not in names:
            names.append(_NAME)
    register_attention_backend(_NAME)(_sglang_backend)


def _sglang_backend(runner: Any) -> Any:
    """SGLang's backend of a ModelRunner; its classes are imported at the first call."""
    from flexattn.integrations.sglang import FlexattnBackend

    return FlexattnBackend(runner)
