"""Operations about which nothing more is known than that they mix, or have no
derivative."""

from __future__ import annotations

from ..compat import solver_constants
from .labels import mixing_labels
from .record import FAMILIES, Operation, register

MIXING = Operation('mixing', mixing_labels)
FAMILIES['mixing'] = MIXING
register(
    MIXING,
    'cholesky triangular_solve lu qr svd eigh eig tridiagonal_solve '
    'select_and_scatter_add '
    'select_and_gather_add conv_general_dilated_patches householder_product',
)
register(Operation('mixing', mixing_labels, solver_constants), 'custom_linear_solve')
register(Operation('opaque', mixing_labels, None), 'while pure_callback io_callback')
register(
    Operation('none', mixing_labels, None),
    'iota rng_uniform rng_bit_generator threefry2x32 random_bits random_seed '
    'random_wrap '
    'random_unwrap random_fold_in random_split random_clone '
    # Checks of brainstate: values that must not be batched, and conditions over a
    # batch.
    'no_vmap unvmap_any unvmap_all unvmap_max',
)
