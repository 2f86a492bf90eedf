"""What is found in a step program: all that lowering and the graph start from.

dependence       what every value of a step depends on, as bits; constants, which depend
                 on nothing; and where credit ends
cuts             the labels, edges and cuts of the paths into a group
pairs            what the elements of a value reach, and how many pairs there are
positions        labels by a pass backward; bodies those of branches, loops and calls
probe            whether an operation without a rule is element-wise, by numbers
groups           hidden groups
sites            where parameters are used
credit           credit classes of parameters
analysed         all of that for one step: :func:`analyse`
"""
