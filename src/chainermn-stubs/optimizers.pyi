from chainermn_facade.optimizers import *
