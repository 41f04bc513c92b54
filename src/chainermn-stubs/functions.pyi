from chainermn_facade.functions import *
