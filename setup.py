"""Where the packages lie; everything else about the distribution stands in pyproject.toml.

This file exists for one reason: the folder ``backends/`` at the top of the repository is the package
``refattn.backends``. pyproject.toml could state such a mapping only together with a hand-written list of every package;
here the list is found.
"""

from setuptools import find_packages, setup

folders = {"refattn": "refattn", "refattn.backends": "backends"}
packages = [
    name
    for package, folder in folders.items()
    for name in (package, *(f"{package}.{found}" for found in find_packages(folder)))
]

setup(package_dir=folders, packages=packages, package_data={"refattn": ["py.typed"]})
