from chainermn_facade.extensions import *
