/* How many processors the process may use: threads beyond that only take turns.
 *
 * The affinity says which ones it may run on, a CPU quota of a control group how much
 * of them it gets. A quota may stand at any level between the process's own group and
 * the root; the least of them counts. In a container the listing may name a group that
 * is not to be seen there: the root of what is to be seen is then its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "thread_team.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int
affinity_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more than a cpu_set_t can name */
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

/* The first numbers of a file; "max" counts as -1. Return how many were there. */
static int
read_numbers(const char *folder, const char *name, long long *first, long long *second)
{
    char path[PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    int found = fscanf(file, "%lld %lld", first, second);
    if (found == 0 && fscanf(file, "max %lld", second) == 1) {
        *first = -1;
        found = 2;
    }
    fclose(file);
    return found < 0 ? 0 : found;
}

/* Whole processors that a folder's quota allows, rounded up; INT_MAX without one. */
static int
quota_of(const char *folder)
{
    long long quota, period, unused;
    int has_quota = read_numbers(folder, "cpu.max", &quota, &period) == 2;
    if (!has_quota) {
        has_quota = read_numbers(folder, "cpu.cfs_quota_us", &quota, &unused) >= 1 &&
                    read_numbers(folder, "cpu.cfs_period_us", &period, &unused) >= 1;
    }
    if (!has_quota || quota <= 0 || period <= 0) {
        return INT_MAX;
    }
    long long whole = quota / period + (quota % period != 0);
    return whole < INT_MAX ? (int)whole : INT_MAX;
}

/* The least quota of a group and those above it, up to the root. */
static int
quota_upwards(const char *root, const char *group)
{
    char folder[PATH_MAX];
    int least = INT_MAX;
    size_t base = strlen(root);
    int length = snprintf(folder, sizeof(folder), "%s%s", root, group);
    if (length < 0 || (size_t)length >= sizeof(folder)) {
        length = snprintf(folder, sizeof(folder), "%s", root);
    }
    for (;;) {
        int quota = quota_of(folder);
        least = quota < least ? quota : least;
        char *slash = strrchr(folder, '/');
        if (slash == NULL || slash < folder + base) {
            return least;
        }
        *slash = '\0';
    }
}

/* Whether a comma-separated list of controllers has "cpu". */
static int
has_cpu(const char *controllers)
{
    for (const char *at = controllers; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == ',' || at[3] == '\0')) {
            return 1;
        }
    }
    return 0;
}

int
cpu_allowance(const char *listing, const char *root)
{
    static const char *const mounts[] = {"/cpu", "/cpu,cpuacct"}; /* of version 1 */
    int count = affinity_count();
    char line[PATH_MAX], mount[PATH_MAX];
    FILE *file = fopen(listing, "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        /* number:controllers:group, no controllers in version 2 */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        if (controllers[1] == '\0') {
            int quota = quota_upwards(root, group);
            count = quota < count ? quota : count;
        }
        else if (has_cpu(controllers + 1)) {
            for (int i = 0; i < 2; i++) {
                snprintf(mount, sizeof(mount), "%s%s", root, mounts[i]);
                int quota = quota_upwards(mount, group);
                count = quota < count ? quota : count;
            }
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return count > 0 ? count : 1;
}
