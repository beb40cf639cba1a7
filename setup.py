"""Everything is in pyproject.toml but this: a native module that is built where there is a compiler, and not missed
where there is none (docs/adr/0005-native-table-load.md)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dpu_app.regions._table_load",
            ["dpu_app/regions/_table_load.c"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
