from chainermn_facade.datasets import *
