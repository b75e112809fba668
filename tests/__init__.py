"""Tests mirror the package's tree. The package is imported first: it prepares `import megatron`."""

import stable_opd_mcore  # noqa: F401
