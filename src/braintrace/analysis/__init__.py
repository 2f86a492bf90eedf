"""What is found in a step program, from its equations to the records of a report.

dependence       what every value of a step depends on, as bits; constants, which depend
                 on nothing; and where credit ends
cuts             the labels, edges and cuts of the paths into a group
pairs            what the elements of a value reach, and how many pairs there are
positions        labels by a pass backward; bodies those of branches, loops and calls
probe            whether an operation without a rule is element-wise, by numbers
groups           hidden groups
sites            uses of parameters; relations, which are the sites of one operation
credit           credit classes of parameters
analysed         all of that for one step: :func:`analyse`
perturbation     new hidden values with a zero added to each
diagnostics      records of what was found; findings and relation_records
                 write them
graph            groups, sites, perturbation and records of one model, for its user
"""
