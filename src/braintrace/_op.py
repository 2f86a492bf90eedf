"""Registries of operations by the names that tutorials of the published package import.

They hold operations made by `register_primitive` with a function. The marked operations of
this package are functions, not primitives, so none of them is here.
"""

from .published.primitives import BATCHED, REGISTERED, RULES

ETP_PRIMITIVES = REGISTERED
BATCHED_PRIMITIVES = BATCHED
ETP_RULES_DT_TO_T = RULES['dt_to_t']
ETP_RULES_XY_TO_DW = RULES['xy_to_dw']
ETP_RULES_INIT_DRTRL = RULES['init_drtrl']
ETP_RULES_INIT_PP = RULES['init_pp']
