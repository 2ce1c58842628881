/* What the sanitizers must report, or test_sanitize.py fails. */
#include <pthread.h>
#include <stdlib.h>

volatile int shared;

int
read_beyond(int index)
{
    int *volatile few = calloc(4, sizeof(int));
    int value = few[index];
    free(few);
    return value;
}

int
overflow(int value)
{
    return value + 0x7fffffff;
}

void
leak(int bytes)
{
    void *volatile lost = malloc((size_t)bytes);
    lost = NULL;
}

static void *
count(void *unused)
{
    for (int i = 0; i < 1000; i++) {
        shared++;
    }
    return unused;
}

void
race(int threads)
{
    pthread_t ids[8];
    for (int i = 0; i < threads; i++) {
        pthread_create(&ids[i], NULL, count, NULL);
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
    }
}
