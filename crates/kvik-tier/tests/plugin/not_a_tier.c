/* A library that has nothing to do with tiers. */

int answer(void);

int answer(void) {
    return 42;
}
