"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """The version of a package; "unknown" for a checkout on the path that was not installed.

    Examples:
        >>> installed_version("no-such-package")
        'unknown'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
