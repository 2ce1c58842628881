/* The kernels, and the table in which the stand-in driver finds them: for each name of
   the list its parameters and a function that runs one thread of it, both from the
   kernel's type. */

#include KERNELS_FILE
#include KERNELS_LIST

#include "kernels_on_cpu.h"

#include <iterator>
#include <utility>

extern "C" void cuda_on_cpu_run(const cpu_launch *launch);

namespace {

template <typename... Types>
struct Parameters {
    static_assert((std::is_trivially_copyable_v<Types> && ...),
                  "parameters are copied as bytes");
    static constexpr size_t count = sizeof...(Types);
    cpu_parameter list[count + 1] = {};
    size_t bytes = 0;

    constexpr Parameters()
    {
        size_t i = 0;
        (add<Types>(i++), ...);
    }

    template <typename T>
    constexpr void
    add(size_t i)
    {
        size_t offset = (bytes + alignof(T) - 1) / alignof(T) * alignof(T);
        list[i] = {(uint32_t)offset, (uint32_t)sizeof(T), std::is_pointer_v<T>};
        bytes = offset + sizeof(T);
    }
};

template <auto function, typename... Types>
struct Kernel {
    static constexpr Parameters<Types...> parameters{};

    template <typename T, size_t i>
    static T
    load(const unsigned char *from)
    {
        T value;
        memcpy(&value, from + parameters.list[i].offset, sizeof(value));
        return value;
    }

    template <size_t... i>
    static void
    call(const unsigned char *from, std::index_sequence<i...>)
    {
        function(load<Types, i>(from)...);
    }

    static void
    thread(const unsigned char *from)
    {
        call(from, std::index_sequence_for<Types...>());
    }

    static constexpr cpu_kernel
    entry(const char *name)
    {
        return {name, sizeof...(Types), parameters.bytes, parameters.list, thread};
    }
};

template <auto function, typename... Types>
constexpr Kernel<function, Types...>
kernel_of(void (*)(Types...))
{
    return {};
}

const cpu_kernel kernels[] = {
#define X(name) kernel_of<name>(name).entry(#name),
    KERNELS(X)
#undef X
};

} // namespace

extern "C" __attribute__((visibility("default"))) const struct cpu_kernels *
cpu_kernels()
{
    static const struct cpu_kernels all = {
        std::size(kernels),
        kernels,
        cuda_on_cpu_run,
    };
    return &all;
}
