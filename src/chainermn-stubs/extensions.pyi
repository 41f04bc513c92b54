from chainermn_train.checkpoint import *
from chainermn_train.extensions import *
