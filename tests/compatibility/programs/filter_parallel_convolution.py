"""A convolution whose filters are dealt over ranks; all get the outputs of all by allgather."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.functions
import numpy as np

FILTERS = 7


class FilterParallelConvolution2D(L.Convolution2D):
    def __init__(self, comm, in_channels, out_channels, ksize, **kwds):
        self.comm = comm
        self.mine = np.array_split(np.arange(out_channels), comm.size)[comm.rank]
        super().__init__(in_channels, len(self.mine), ksize, **kwds)

    def forward(self, x):
        parts = chainermn.functions.allgather(self.comm, super().forward(x))
        return F.concat(parts, axis=1)


def make_filters():
    # Small integers, of which sums are exact in any order.
    return np.random.RandomState(0).randint(-3, 4, (FILTERS, 2, 3, 3)).astype("f4")


def make_images():
    return np.random.RandomState(1).randint(-3, 4, (2, 2, 6, 6)).astype("f4")


def main():
    comm = chainermn.create_communicator("naive")
    layer = FilterParallelConvolution2D(comm, 2, FILTERS, 3, pad=1)
    layer.W.array[...] = make_filters()[layer.mine]
    images = chainer.Parameter(make_images())
    outputs = layer(images)
    layer.cleargrads()
    images.cleargrad()
    F.sum(outputs**2).backward()
    result = {
        "outputs": outputs.array.tolist(),
        "filters": layer.W.grad.tolist(),
        "images": images.grad.tolist(),
    }
    everyone = comm.gather_obj(result)
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()
