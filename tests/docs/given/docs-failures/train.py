import chainermn

chainermn.create_communicator()
