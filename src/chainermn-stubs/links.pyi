from chainermn_facade.links import *
