"""Positions, hidden groups, sites, perturbation, the graph and its diagnostics."""
