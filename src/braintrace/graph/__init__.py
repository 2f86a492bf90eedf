"""The documented compiler: records of what was found in a model's step, for its user.

etrace_graph         :class:`ETraceGraph`: all records of one model
hidden_group         hidden groups and their transition programs
hidden_perturbation  new hidden values with a zero added to each
module_info          the traced step; function_info that of a model that is no module
relations            uses of parameters, and the operations that they belong to
executor             compiles a module's graph; Jacobians of one step
diagnostics          records of what was found; findings and relation_records write them
"""
