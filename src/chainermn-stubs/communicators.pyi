from chainermn_facade.communicators import *
