from tests.quick_interpreter import hurry

hurry()
