"""What pyproject.toml cannot say. The shipped folders lie beside the packages in a checkout, where pages and programs name them;
an installation keeps them in a package of their own, because their names are anybody's (tinker_local_backend/shipped.py)."""

from setuptools import find_namespace_packages, setup

SHIPPED = {"tinker_local_data.example_data": "example_data", "tinker_local_data.configs": "configs"}
CODE = ("tinker_cookbook*", "tinker_local_backend*", "recipes*")

setup(
    packages=[*find_namespace_packages(include=CODE), *SHIPPED],
    package_dir=SHIPPED,
    package_data={"tinker_cookbook.report": ["static/*"], **{name: ["**/*"] for name in SHIPPED}},
    exclude_package_data={name: ["**/__pycache__/*"] for name in SHIPPED},
    include_package_data=False,
)
