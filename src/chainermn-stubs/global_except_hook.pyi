from chainermn_facade.global_except_hook import *
