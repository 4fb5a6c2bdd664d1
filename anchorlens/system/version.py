"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("anchorlens")
except PackageNotFoundError:  # a checkout on the path of Python, which was not installed
    __version__ = "0+unknown"
