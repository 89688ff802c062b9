"""Checks the versions of Python and packages, without importing these: an unsupported one could fail on import."""

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from omnibal_ext.errors import UserError, missing_package

SUPPORTED = {"torch": ">=2.8,<3", "megatron-core": ">=0.19.2,<0.20"}
PYTHON = ">=3.11,<3.14"


def check_versions() -> str:
    """Return a line with all versions. Raises UserError for a missing package or unsupported version."""
    if platform.python_version() not in SpecifierSet(PYTHON):
        raise UserError(f"Python {platform.python_version()}; {PYTHON} is needed: see scripts/setup.sh")
    found = {"python": platform.python_version()}
    for package, wanted in SUPPORTED.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            needed = missing_package(package.replace("-", ".")) or f"{package} {wanted}"
            raise UserError(f"training needs {needed}; in a clone run scripts/setup.sh and enter .venv") from None
        if not SpecifierSet(wanted).contains(found[package], prereleases=True):
            raise UserError(f"{package} is {found[package]}; {wanted} is needed: run scripts/setup.sh and enter .venv")
    return ", ".join(f"{name} {number}" for name, number in found.items())
