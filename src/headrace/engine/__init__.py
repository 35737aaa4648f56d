from headrace import cores

cores.let_idle_threads_sleep()  # before any module of the engine imports torch
