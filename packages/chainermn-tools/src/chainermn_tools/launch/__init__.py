"""Jobs that are started through mpiexec, watched, and judged by what their ranks say."""

__all__: list[str] = []
