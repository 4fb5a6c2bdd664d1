"""Whether an object has the methods of a protocol.

``isinstance`` with a protocol depends on the version of Python: until 3.11 it evaluates properties
of the object, and from 3.12 on it overlooks attributes that come from ``__getattr__``. Therefore
the package asks by the functions next to its protocols (``tests/test_architecture.py``).
"""


def has_methods(value: object, *names: str) -> bool:
    """Whether all of these attributes exist and can be called."""
    return all(callable(getattr(value, name, None)) for name in names)
