"""stated: feasibility of every family as sympy says it; printed*.py are its Python forms.

No call needs sympy: a family asks the rules of its printed module, whose rows are a name, words,
and what must hold. Each module here ends with a Statement, by these words: symbols for a case's
numbers, `let("name", value)` for the steps of a formula, Inequality for a rule.
"""
