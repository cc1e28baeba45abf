"""stated: feasibility as sympy says it. No call needs it: space/printed.py is its Python form."""
