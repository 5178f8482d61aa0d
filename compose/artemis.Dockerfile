# Apache Artemis with the interceptor that keeps what STOMP clients reject.
# Built from the folder of its source: docker build --file compose/artemis.Dockerfile rooms/local
FROM apache/artemis:2.56.0 AS broker

# The broker's image has no compiler.
FROM eclipse-temurin:17.0.15_6-jdk-noble AS build
WORKDIR /build
COPY --from=broker /opt/artemis/lib /opt/artemis/lib
COPY NackInterceptor.java ./
RUN javac --release 17 -proc:none -nowarn -d classes -classpath '/opt/artemis/lib/*' NackInterceptor.java \
    && jar --create --file nack-interceptor.jar -C classes .

FROM broker
COPY --from=build /build/nack-interceptor.jar /opt/artemis/lib/
