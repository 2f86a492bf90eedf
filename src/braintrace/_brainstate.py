"""brainstate, imported in such a way that ``jax_enable_x64`` stays as the user set it.

Files of the package that may be the first to import brainstate take it from here.
"""

from .compat import keep_x64

# brainstate sets jax_enable_x64 to its own default when it is first imported.
with keep_x64():
    import brainstate

__all__ = ['brainstate']
