"""aura-omni: the online server for AURA, a live assistant that hears, sees, decides and speaks.

from aura_omni import Pipeline      # the same without a server, see aura_omni.asking
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aura_omni.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__"]


def __getattr__(name: str) -> Any:
    """torch takes seconds to import, and only who asks for a Pipeline needs it."""
    if name == "Pipeline":
        from aura_omni.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
