"""The two networks: one writes digits of 8 x 8 pixels, the other judges them."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

N_HIDDEN = 32  # random numbers that a digit is made of


class Generator(chainer.Chain):
    """Makes images (N, 1, 8, 8) in -1..1 of random numbers (N, 32)."""

    def __init__(self):
        super().__init__()
        w = chainer.initializers.Normal(0.05)
        with self.init_scope():
            self.l0 = L.Linear(N_HIDDEN, 64 * 2 * 2, initialW=w)
            self.dc1 = L.Deconvolution2D(64, 32, ksize=4, stride=2, pad=1, initialW=w)
            self.dc2 = L.Deconvolution2D(32, 1, ksize=4, stride=2, pad=1, initialW=w)
            self.bn0 = L.BatchNormalization(64 * 2 * 2)
            self.bn1 = L.BatchNormalization(32)

    def draw(self, n, random=np.random):
        return random.normal(size=(n, N_HIDDEN)).astype(np.float32)

    def forward(self, z):
        h = F.relu(self.bn0(self.l0(z))).reshape(-1, 64, 2, 2)
        h = F.relu(self.bn1(self.dc1(h)))
        return F.tanh(self.dc2(h))


class Discriminator(chainer.Chain):
    """Gives each image (N, 1, 8, 8) a score (N, 1): above zero where it takes it for real."""

    def __init__(self):
        super().__init__()
        w = chainer.initializers.Normal(0.05)
        with self.init_scope():
            self.c0 = L.Convolution2D(1, 32, ksize=4, stride=2, pad=1, initialW=w)
            self.c1 = L.Convolution2D(32, 64, ksize=4, stride=2, pad=1, initialW=w)
            self.bn1 = L.BatchNormalization(64)
            self.l2 = L.Linear(64 * 2 * 2, 1, initialW=w)

    def forward(self, x):
        h = F.leaky_relu(self.c0(x))
        h = F.leaky_relu(self.bn1(self.c1(h)))
        return self.l2(F.dropout(h, 0.3))
