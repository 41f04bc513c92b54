from chainermn_facade.iterators import *
