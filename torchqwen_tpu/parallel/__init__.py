"""Layout of a model over devices: the mesh, and the one table that maps logical axes to it."""

from torchqwen_tpu.parallel.mesh import DeviceMesh, build_mesh

__all__ = ["DeviceMesh", "build_mesh"]
