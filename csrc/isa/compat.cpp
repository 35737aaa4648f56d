// Lets the extension load where glibc is as old as 2.28 and libstdc++ as GCC 8's, whatever compiles it: what newer ones have
// under a new version is taken from here instead. tools/wheel/run.py checks that nothing else is missing.
#if defined(__GNUC__) && !defined(__clang__) && defined(__linux__)

#include <new>

namespace std {

// Of libstdc++ since GCC 11.
__attribute__((noreturn, visibility("hidden"))) void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }

}  // namespace std

#endif
