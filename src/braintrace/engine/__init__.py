"""Running a compiled graph: signals, Jacobians and the executor."""
