"""What is found in a step program, from its equations to the records of a report.

dependence       what every value depends on, as bits; step_dependence of a whole step
constants        values that depend on no input
opaque           operations without a reverse derivative
cuts             the labels, edges and cuts of the paths into a group
pairs            what the elements of a value reach
positions        labels by a pass backward; bodies those of branches, loops and calls
origins          which element reaches each position, and how many pairs there are
probe            whether an operation without a rule is element-wise, by numbers
groups           hidden groups
sites            uses of parameters
analysed         all of that for one step: :func:`analyse`
perturbation     new hidden values with a zero added to each
credit           credit classes of parameters
diagnostics      records of what was found; findings and relations write them
graph            groups, sites, perturbation and records of one model
"""
